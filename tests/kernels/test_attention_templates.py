"""The attention templates against the oracle, in the interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from tilewright.kernel_templates.base import Template, Value, Values, run_kernel
from tilewright.kernel_templates.device import INTERPRETER_LIMITS, named_limits
from tilewright.kernel_templates.gqa_attention.flash_attention import TEMPLATE
from tilewright.kernel_templates.gqa_attention.library_attention import SDPA
from tilewright.kernel_templates.gqa_attention.reference import OPS
from tilewright.kernel_templates.reference import cast, run_ops
from tilewright.problem import WorkloadCase, load_problem

SMALL = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2}
GROUP_OF_12 = {**SMALL, "num_attention_heads": 12, "num_key_value_heads": 1}
WIDE_HEADS = {**SMALL, "head_dim": 128, "num_attention_heads": 4}
LENGTHS = (1, 7, 15, 17, 63, 65, 127, 129)


def a_case(
    seq_len: int, constants: Mapping[str, int] = SMALL, *, batch_size: int = 2, dtype: str = "bfloat16"
) -> WorkloadCase:
    problem = load_problem().with_dtype(dtype).with_constants(**constants)
    return problem.case(batch_size=batch_size, seq_len=seq_len)


def make_qkv(case: WorkloadCase, seed: int = 0) -> torch.Tensor:
    """Random rows with NaN memory right behind them."""
    shape, numel = case.shape("qkv"), case.numel("qkv")
    dtype = getattr(torch, case.problem.dtype)
    memory = torch.full((numel + 64 * 1024,), float("nan"), dtype=dtype)
    memory[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return memory[:numel].view(shape or ())


def attend(template: Template, values: Values, case: WorkloadCase, qkv: torch.Tensor) -> torch.Tensor:
    context = torch.full(case.shape("context") or (), float("nan"), dtype=qkv.dtype)
    template.launch({"qkv": qkv, "context": context}, values, case, run_kernel)
    return context


def assert_close(context: torch.Tensor, case: WorkloadCase, qkv: torch.Tensor) -> None:
    """At most twice the error of the eager block in the same precision, against float64."""
    truth = run_ops(OPS, ["attention"], cast({"qkv": qkv}, torch.float64), case)["context"]
    eager = run_ops(OPS, ["attention"], {"qkv": qkv}, case)["context"]
    bound = 2 * (eager.double() - truth).abs().max()
    assert (context.double() - truth).abs().max() <= bound + 1e-6


def varied(case: WorkloadCase, **fixed: Value) -> Values:
    """A valid config with these values, as near to the default as there is."""
    default = TEMPLATE.default(case, INTERPRETER_LIMITS)
    fitting = [v for v in TEMPLATE.valid_configs(case, INTERPRETER_LIMITS) if all(v[n] == x for n, x in fixed.items())]
    assert fitting, f"no valid config has {fixed}"
    return min(fitting, key=lambda v: sum(v[name] != default[name] for name in v))


def covering(case: WorkloadCase) -> Iterator[Values]:
    """Few valid configs that together show every value of every choice that is valid here."""
    valid = TEMPLATE.valid_configs(case, INTERPRETER_LIMITS)
    missing = {item for values in valid for item in values.items()}
    while missing:
        most = max(valid, key=lambda values: len(missing & set(values.items())))
        missing -= set(most.items())
        yield most


class TestFlashAttention:
    @pytest.mark.parametrize(
        ("constants", "seq_len"),
        [*((SMALL, s) for s in LENGTHS), (GROUP_OF_12, 1), (GROUP_OF_12, 17), (GROUP_OF_12, 65)],
    )
    def test_covering_configs_match_the_oracle(self, constants: Mapping[str, int], seq_len: int) -> None:
        case = a_case(seq_len, constants)
        qkv = make_qkv(case)
        before = qkv.clone()
        for values in covering(case):
            assert_close(attend(TEMPLATE, values, case, qkv), case, qkv)
        assert torch.equal(qkv, before)

    @pytest.mark.parametrize("seq_len", [17, 129])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_wide_heads_match_the_oracle(self, seq_len: int, dtype: str) -> None:
        case = a_case(seq_len, WIDE_HEADS, dtype=dtype)
        qkv = make_qkv(case)
        for tma in (False, True):
            assert_close(attend(TEMPLATE, varied(case, USE_TMA=tma), case, qkv), case, qkv)

    @pytest.mark.parametrize(("block_m", "block_n"), [(64, 32), (64, 128), (128, 32), (128, 64)])
    def test_unequal_blocks_match_the_oracle(self, block_m: int, block_n: int) -> None:
        case = a_case(129, {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1})
        qkv = make_qkv(case)
        for prefetch in (False, True) if block_n < 128 else (False,):
            values = varied(case, BLOCK_M=block_m, BLOCK_N=block_n, PREFETCH_SCORES=prefetch)
            assert_close(attend(TEMPLATE, values, case, qkv), case, qkv)

    def test_every_choice_is_reachable(self) -> None:
        """No value is ruled out by the constraints at every published case."""
        limits = named_limits(90, 132)
        suite = load_problem().suite("full")
        seen = {item for case in suite for v in TEMPLATE.valid_configs(case, limits) for item in v.items()}
        offered = {(c.name, value) for c in TEMPLATE.choices(suite[0], limits) for value in c.values}
        assert offered == seen

    @pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
    @pytest.mark.parametrize("name", ["b1s1", "b1s16", "b4s293", "b2s2048", "b1s131072"])
    def test_default_is_valid(self, capability: int, name: str) -> None:
        case, limits = load_problem().parse_case(name), named_limits(capability, 132)
        values = TEMPLATE.default(case, limits)
        TEMPLATE.check_values(values, case, limits)
        assert TEMPLATE.rejection(values, case, limits) is None


@pytest.mark.parametrize("template", [TEMPLATE, SDPA], ids=attrgetter("name"))
class TestAttentionTemplates:
    def test_default_matches_the_oracle(self, template: Template) -> None:
        case = a_case(67)
        qkv = make_qkv(case)
        assert_close(attend(template, template.default(case, INTERPRETER_LIMITS), case, qkv), case, qkv)

    @pytest.mark.parametrize("constants", [SMALL, {**GROUP_OF_12, "num_attention_heads": 24, "num_key_value_heads": 2}])
    def test_noise_on_a_kv_head_changes_only_its_queries(
        self, template: Template, constants: Mapping[str, int]
    ) -> None:
        case = a_case(65, constants, batch_size=1)
        heads, kv_heads = case["num_attention_heads"], case["num_key_value_heads"]
        values = template.default(case, INTERPRETER_LIMITS)
        qkv = make_qkv(case)
        noisy = qkv.clone()
        rows = noisy.unflatten(-1, (-1, case["head_dim"]))
        rows[:, :, heads + 1] += 1
        rows[:, :, heads + kv_heads + 1] += 1
        changed = (attend(template, values, case, qkv) != attend(template, values, case, noisy)).unflatten(
            -1, (heads, case["head_dim"])
        )
        assert changed.any(-1).any(1)[0].tolist() == [head >= heads // kv_heads for head in range(heads)]

    def test_later_tokens_do_not_reach_earlier_ones(self, template: Template) -> None:
        case = a_case(66, batch_size=2)
        values = template.default(case, INTERPRETER_LIMITS)
        qkv = make_qkv(case)
        later = qkv.clone()
        later[:, 40:] += 1
        before, after = attend(template, values, case, qkv), attend(template, values, case, later)
        assert torch.equal(before[:, :40], after[:, :40])

    @pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the poisoned row's own arithmetic
    def test_a_batch_row_does_not_read_its_neighbour(self, template: Template) -> None:
        case = a_case(17, batch_size=2)
        values = template.default(case, INTERPRETER_LIMITS)
        qkv = make_qkv(case)
        clean = attend(template, values, case, qkv)
        qkv[1] = float("nan")
        assert torch.equal(attend(template, values, case, qkv)[0], clean[0])


COMPILE = """
import json
from tilewright.kernel_templates.compile import compile_stage
from tilewright.kernel_templates.device import named_limits
from tilewright.kernel_templates.gqa_attention import flash_attention, norm_rope
from tilewright.problem import load_problem
found = []
for capability in (80, 90, 100):
    limits = named_limits(capability, 132)
    for template in (flash_attention.TEMPLATE, norm_rope.TEMPLATE):
        case = load_problem().parse_case("b2s2048")
        for kernel in compile_stage(template, template.default(case, limits), case, limits):
            sizes = kernel.shared_memory_bytes, limits.shared_memory_bytes, len(kernel.cubin)
            found.append((template.name, capability, *sizes))
print(json.dumps(found))
"""


def test_defaults_compile_within_shared_memory() -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root / ".src")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COMPILE], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {(name, capability) for name, capability, *_ in found} == {
        (name, capability) for name in ("flash_attention", "norm_rope") for capability in (80, 90, 100)
    }
    assert all(size > 0 and used <= limit for _, _, used, limit, size in found)
