"""Real compilation for cards that are not here, in one child process: this one interprets its kernels.

Run as a script it reads requests from stdin and writes what was compiled to stdout, both as JSON.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Request:
    """One template at one case: `case` are keyword arguments of kernel_checks.a_case, or the name of a case of a
    shipped problem; no `values` means the default."""

    module: str
    case: dict[str, Any] | str
    capability: int
    sm_count: int = 132
    values: dict[str, Any] | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Compiled:
    """One kernel; sizes in bytes, `stack_bytes` is what spilled."""

    name: str
    shared_memory_bytes: int
    registers: int
    stack_bytes: int
    instructions: dict[str, int] = field(default_factory=dict)


def compile_in_child(requests: list[Request]) -> list[list[Compiled]]:
    """The kernels of each request, in order; raises AssertionError with the child's words when one does not compile."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT / ".src"), str(ROOT / "tests")]),
    }
    content = json.dumps([asdict(request) for request in requests])
    child = subprocess.run([sys.executable, __file__], input=content, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-3000:]
    return [[Compiled(**kernel) for kernel in kernels] for kernels in json.loads(child.stdout)]


def _compile(request: Request) -> list[Compiled]:
    from kernel_checks import a_case

    from tilewright.kernel_templates.compile import compile_stage
    from tilewright.kernel_templates.device import named_limits
    from tilewright.problem import load_problem

    template = importlib.import_module(request.module).TEMPLATE
    limits = named_limits(request.capability, request.sm_count)
    if isinstance(request.case, str):
        case = load_problem(*filter(None, [request.problem])).parse_case(request.case)
    else:
        case = a_case(**request.case)
    values = request.values or template.default(case, limits)
    reason = template.rejection(values, case, limits)
    assert reason is None, f"{template.name} {values} at {case.name} on sm_{request.capability} is rejected: {reason}"
    return [_described(kernel) for kernel in compile_stage(template, values, case, limits)]


def _described(kernel: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.cubin)
        usage = _tool("cuobjdump", "-res-usage", file.name)
        assembly = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    counts = {name: len(re.findall(rf"\b{name}\b", assembly)) for name in ("HGMMA", "UTMALDG", "HMMA", "LDGSTS")}
    return Compiled(kernel.name, kernel.shared_memory_bytes, int(found[1]), int(found[2]), counts)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    requests = [Request(**entry) for entry in json.load(sys.stdin)]
    json.dump([[asdict(kernel) for kernel in _compile(request)] for request in requests], sys.stdout)
