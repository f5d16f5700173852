"""Put Gloo and the CPU in the place of NCCL and GPUs in one of upstream's test files.

Most of torch's pipelining tests ask for two accelerators but test nothing of them.
Their source is rewritten on the way into a temporary folder, by rules over its
expressions, since the same wishes are spelled differently in each release; line
numbers stay. A test that still asks for what the CPU lacks fails on stock torch,
and is then not compared.
"""

import ast
import re

DEVICES = "cuda|xpu|hpu"
RUNTIME = rf"torch\.({DEVICES}|accelerator)"
ENOUGH_DEVICES = "TEST_(MULTI)?(GPU|CUDA|ACCELERATOR)"

# What `ast.unparse` makes of an expression, and what stands in its place.
RULES = [
    (re.compile(pattern), text)
    for pattern, text in [
        # A CPU has no index, and "meta" is no accelerator.
        (r"torch\.device\((?!'meta').*\)", "torch.device('cpu')"),
        (rf"{RUNTIME}\.current_accelerator\(.*\)", "torch.device('cpu')"),
        (rf"'({DEVICES})(:\d+)?'", "'cpu'"),
        (rf"f'({DEVICES}|{{[\w.]*device_type}}):{{[^{{}}]*}}'", "'cpu'"),
        (r"'(nccl|xccl|hccl)'", "'gloo'"),
        (rf"({RUNTIME}|torch\.get_device_module\(.*\))\.device_count\(\)", "2"),
        (rf"{RUNTIME}\.is_available\(\)|[\w.]+\.is_(nccl|xccl)_available\(\)", "True"),
        (rf"{ENOUGH_DEVICES}|at_least_x_gpu\(.*\)", "True"),
        (rf"{RUNTIME}\.(set_device(_index|_idx)?|synchronize|empty_cache)\(.*\)", "None"),
        (
            r"(requires_(nccl|nccl_version|accelerator_dist_backend|world_size)|skip_if_lt_x_gpu)"
            r"\(.*\)",
            "lambda test: test",
        ),
    ]
]
# Gloo takes neither.
WITHOUT_VALUE = {"device_id", "device_ids"}

ASKS = re.compile(
    rf"{ENOUGH_DEVICES}|is_nccl_available|requires_(nccl|accelerator)|skip_if_lt_x_gpu"
    rf"|at_least_x_gpu|device_count"
)


def asks_for_accelerators(source: str) -> bool:
    """Whether a test file would be skipped, in part at least, without two of them."""
    return ASKS.search(source) is not None


def on_gloo(source: str) -> str:
    """The test file's source with Gloo and the CPU in place, line by line the same."""
    lines = source.encode().splitlines(keepends=True)
    for node, text in sorted(_edits(ast.parse(source)), key=_position, reverse=True):
        # Brackets, so that an expression of several lines leaves as many.
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        breaks = "\n" * (end_line - node.lineno)
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[end_line - 1][end:]
        lines[node.lineno - 1 : end_line] = (
            before + f"({text}{breaks})".encode() + after
        ).splitlines(keepends=True)
    return b"".join(lines).decode()


def _position(edit: "tuple[ast.expr, str]") -> "tuple[int, int]":
    return edit[0].lineno, edit[0].col_offset


def _edits(node: ast.AST) -> "list[tuple[ast.expr, str]]":
    """What is replaced below a node, the outermost first; nothing in it is looked at again."""
    if isinstance(node, ast.keyword) and node.arg in WITHOUT_VALUE:
        return [(node.value, "None")]
    if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        spelled = ast.unparse(node)
        for pattern, text in RULES:
            if pattern.fullmatch(spelled):
                return [(node, text)]
        if isinstance(node, ast.JoinedStr):  # what is in it has no positions before 3.12
            return []
    return [edit for child in ast.iter_child_nodes(node) for edit in _edits(child)]
