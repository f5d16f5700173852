"""Whether the methods that a policy wraps are those of a release that was tried.

As kernel live-patching does: a fingerprint of each method's source, by the releases that have
it, lies beside this file; `nox -s releases` writes it with the record. Vendor builds often have
the methods of a release. Worked out when asked for, never at import.
"""

import hashlib
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any, Optional

from pp_hookfix.decision import stage_classes_with
from pp_hookfix.policies import ALL

FILE = Path(__file__).with_suffix(".json")
WRAPPED = sorted({name for policy in ALL.values() for name in policy.methods})


def fingerprints(stage_module: ModuleType) -> dict[str, str]:
    """Of each method that a policy wraps, as it was before anybody wrapped it.

    Args:
        stage_module: ``torch.distributed.pipelining.stage``.

    Returns:
        By ``Class.method``. A method whose source cannot be had has an empty one.
    """
    return {
        f"{cls.__name__}.{name}": _fingerprint(vars(cls)[name])
        for name in WRAPPED
        for cls in stage_classes_with(stage_module, name)
    }


def _fingerprint(method: Any) -> str:
    try:
        source = inspect.getsource(inspect.unwrap(method))
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def tried_as(stage_module: ModuleType, policy: str) -> list[str]:
    """The releases, of those that were tried, whose methods `policy` finds here."""
    recorded: dict[str, dict[str, list[str]]] = json.loads(FILE.read_text(encoding="utf-8"))
    found: Optional[set[str]] = None
    for method, fingerprint in fingerprints(stage_module).items():
        if method.partition(".")[2] in ALL[policy].methods:
            releases = set(recorded.get(method, {}).get(fingerprint, ()) if fingerprint else ())
            found = releases if found is None else found & releases
    every = [one for by_source in recorded.values() for some in by_source.values() for one in some]
    return [release for release in dict.fromkeys(every) if release in (found or ())]


def in_words(releases: list[str]) -> str:
    """The answer, for a person."""
    if not releases:
        return (
            "What it wraps is unlike that of every release that was tried: `pp-hookfix verify` "
            "will tell."
        )
    which = releases[0] if len(releases) == 1 else f"{releases[0]} to {releases[-1]}"
    return f"What it wraps is, word for word, that of torch {which}, which was tried."


def text(by_release: dict[str, dict[str, str]]) -> str:
    """What the file beside this one says, from the `fingerprints` of each release."""
    recorded: dict[str, dict[str, list[str]]] = {}
    for release, methods in by_release.items():
        for method, fingerprint in methods.items():
            recorded.setdefault(method, {}).setdefault(fingerprint, []).append(release)
    return json.dumps(recorded, indent=1) + "\n"
