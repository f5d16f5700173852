"""What a stage is handed in place of its persistent receive buffer: three policies.

============================================== ======== ======= =======
what a stage gets                               detach   clone   fresh
============================================== ======== ======= =======
hooks, ``.grad``, attributes end with the step  yes      yes     yes
no data copy                                    yes      no      yes
the receive buffer keeps its memory             yes      yes     no
an input kept across steps stays what it was    no       yes     yes
a received gradient that is kept stays, too     no       yes     yes
receive buffers alive                           all      all     in flight
============================================== ======== ======= =======

Each has a module of its own, by its name.
"""

# Read at interpreter start for the policies' names: no import at module level.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional


class Around:
    """What a policy does around a method of torch's stages: functions, as module.name.

    Called as ``before(stage, args, kwargs)``, and ``after(stage, result, args, kwargs)``,
    which returns what the caller is to get.
    """

    __slots__ = ("after", "before", "is_optional")

    def __init__(
        self,
        before: "Optional[str]" = None,
        after: "Optional[str]" = None,
        is_optional: bool = False,
    ) -> None:
        self.before = before
        self.after = after
        self.is_optional = is_optional
        """Whether there are releases without that method, on which nothing depends on it."""


class Policy:
    """The methods that it wraps, and what is to be called when it ends."""

    __slots__ = ("at_end", "methods")

    def __init__(self, methods: "dict[str, Around]", at_end: "Optional[str]" = None) -> None:
        self.methods = methods
        self.at_end = at_end


POLICIES = {
    "detach": Policy(
        {"_retrieve_recv_activations": Around(after="detach.alias_activations")},
    ),
    "clone": Policy(
        {
            "_retrieve_recv_activations": Around(after="clone.copy_activations"),
            "_retrieve_recv_grads": Around(after="clone.copy_gradients"),
        },
    ),
    "fresh": Policy(
        {
            "_prepare_forward_infra": Around(after="fresh.take_charge"),
            "_prepare_backward_infra": Around(after="fresh.take_charge"),
            "_get_recv_ops": Around("fresh.allocate"),
            # Of V schedules, from torch 2.6 on.
            "set_local_fwd_input": Around(after="fresh.own_activations", is_optional=True),
            "set_local_bwd_input": Around(
                "fresh.allocate_for_missing", "fresh.own_gradients", is_optional=True
            ),
            "_retrieve_recv_activations": Around(
                "fresh.check_activations", "fresh.take_activations"
            ),
            "_retrieve_recv_grads": Around("fresh.check_gradients", "fresh.take_gradients"),
        },
        at_end="fresh.release",
    ),
}
DEFAULT = "detach"
# Of the command `pp-hookfix audit`, which hands out what torch does and looks at it.
AUDIT = "audit"
ALL = {
    **POLICIES,
    AUDIT: Policy(
        {
            "clear_runtime_states": Around(
                "audit.hand_outs.end_step", "audit.hand_outs.begin_step"
            ),
            "_get_recv_ops": Around("audit.hand_outs.before_receive"),
            "_retrieve_recv_activations": Around(after="audit.hand_outs.hand_out_activations"),
            "_retrieve_recv_grads": Around(after="audit.hand_outs.hand_out_gradients"),
            "backward_one_chunk": Around(
                "audit.hand_outs.begin_backward", "audit.hand_outs.end_backward"
            ),
        },
    ),
}


class Refused(RuntimeError):
    """What a stage asks of a receive buffer, and cannot have under the policy that is on."""
