"""Put first on PYTHONPATH by ``pp-hookfix run``: the fix in every Python process below it.

Python imports the first ``sitecustomize`` that it finds, at the end of its own
start. This one imports pp_hookfix, then makes way for the environment's own.
Interpreters of any age and environment meet it: no syntax newer than Python 2's,
and nothing that fails may keep one from starting.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGES = os.path.dirname(os.path.dirname(_HERE))

# Gone before anything else is imported: nothing of ours may shadow the user's
# modules. Children find it again, in the environment's PYTHONPATH.
sys.path[:] = [_entry for _entry in sys.path if os.path.abspath(_entry) != _HERE]

# The pp_hookfix whose command was run, also where this interpreter has another
# one or none. It has imported all that it needs of the path when this returns.
# No torch with the fault runs on a Python below 3.8.
if sys.version_info >= (3, 8):
    sys.path.insert(0, _PACKAGES)
    try:
        if sys.version_info < (3, 9):
            raise RuntimeError("it needs Python 3.9")
        import pp_hookfix  # noqa: F401
    except Exception as error:
        sys.stderr.write("pp-hookfix: %s runs without the fix: %s\n" % (sys.executable, error))
    finally:
        sys.path.remove(_PACKAGES)

# The environment's own, once, as if this one had never been: what it raises is
# its own, for Python to report. If there is none, Python is told so, as ever.
_ours = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
finally:
    # Python's import of this module ends by looking it up.
    if "sitecustomize" not in sys.modules and _ours is not None:
        sys.modules["sitecustomize"] = _ours
    # OpenTelemetry's has put its own folder first for the children, which chains to nobody.
    _path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _HERE in _path[1:]:
        _path.remove(_HERE)
        os.environ["PYTHONPATH"] = os.pathsep.join([_HERE] + _path)  # noqa: RUF005
