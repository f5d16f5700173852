"""Give every pipeline-parallel microbatch its own input activation.

On torch 2.4 - 2.14, ``torch.distributed.pipelining`` hands each stage its
persistent receive buffer as the input activation, so whatever is put on that
input (backward hooks above all) piles up step after step: pytorch issue 185331.
Importing this package fixes that, before or after torch is imported; on a
torch that allocates each receive just in time (2.15, PR 196463) it does nothing.
"""

# Runs at interpreter start wherever a sitecustomize imports it: it may load
# nothing that a bare interpreter has not loaded already, so neither torch nor
# wrapt, nor typing, logging, warnings, ... (tests/test_import_cost.py).
from pp_hookfix import settings
from pp_hookfix.activation import activate, disable, enable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pp_hookfix.decision import Status

__all__ = ["disable", "enable", "status"]
__version__ = "0.3.0"


def status() -> "Status":
    """What is true in this process now; an immutable value.

    Its ``state`` is ``pending`` until ``torch.distributed.pipelining`` is imported; then
    ``patched``, ``not-needed``, ``unsupported``, or ``untried`` for a release from 2.15 on that
    is not as 2.15 is, and is left untouched; ``bypassed`` where the fix went in
    and what stands in torch now does not call it, until ``enable()`` mends that; or ``off``.
    ``reason`` is one sentence for a person.
    """
    from pp_hookfix import current_status

    return current_status.status()


activate()
if settings.is_audited():
    from pp_hookfix.audit import process_record

    process_record.begin()
