"""What the device answers about a candidate: plain values that cross the process border."""

from dataclasses import dataclass, field

from tilewright.db.rows import Status
from tilewright.kernel_templates.plan import FusionPlan, Stage

PROTOCOL = "2"  # raised whenever the way of checking or measuring changes; trials of another one are not reused
Candidate = Stage | FusionPlan


@dataclass(frozen=True)
class MeasureOptions:
    """How a candidate is timed."""

    regime: str = "graph"  # graph: CUDA graph replay; eager: ordinary launches
    cold_l2: bool = True
    input_sets: int = 4
    warmup_ms: float = 25.0
    min_samples: int = 10
    max_samples: int = 50
    budget_ms: float = 60.0  # device time after which no further sample is begun once min_samples are there
    cut_above_us: float | None = None  # stop after min_samples // 2 when the median is above this

    @property
    def regime_name(self) -> str:
        """What is stored: times of two regimes are not comparable."""
        return self.regime if self.cold_l2 else f"{self.regime}-warm"


@dataclass(frozen=True)
class Facts:
    """What the compiler reported, summed over the candidate's kernels where that makes sense (maximum otherwise)."""

    registers: int | None = None
    shared_memory_bytes: int | None = None
    spill_bytes: int | None = None


@dataclass(frozen=True)
class TrialOutcome:
    """Result of compile -> verify -> measure for one candidate; `samples_us` is empty unless status is ok."""

    status: Status
    reason: str = ""
    samples_us: tuple[float, ...] = ()
    error_ratio: float | None = None
    compile_s: float | None = None
    gpu_s: float | None = None
    facts: Facts = field(default_factory=Facts)
    noisy: str = ""


@dataclass(frozen=True)
class FinalEntry:
    """One contestant of a paired final: a plan, or a baseline of the family by name."""

    name: str
    plan: FusionPlan | None = None  # None: `name` is a baseline
    source: str = ""  # default | incumbent | candidate | baseline
    cost: tuple[int, int] = (0, 0)  # registers and shared memory, bytes; settles ties


@dataclass(frozen=True)
class FinalSamples:
    """Times by contestant and round, microseconds; equal index means the same round and the same inputs."""

    rounds: dict[str, tuple[float, ...]]
    failures: dict[str, str] = field(default_factory=dict)  # contestants that did not finish, with the reason
    deterministic: dict[str, bool] = field(default_factory=dict)
    noisy: str = ""
