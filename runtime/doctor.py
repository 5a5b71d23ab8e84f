"""Is this machine fit to tune and to serve? Each check answers on its own; none raises, none changes anything."""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from tilewright.errors import DatabaseError, MissingDatabase, UsageError

OLDEST = {"torch": "2.11", "triton": "3.6"}
# Two empty event records lie a few microseconds apart; far more means that something else holds the device.
WIDEST_GAP_US = 20.0


class State(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Check:
    """One finding; `detail` says what was found and, unless ok, what to do."""

    name: str
    state: State
    detail: str

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


def examine(db: str | Path | None = None) -> list[Check]:
    """Every check, in the order in which a person would ask; `db` as for the other commands."""
    return [
        _version("torch"),
        _version("triton"),
        _gpu(),
        *_nvml(),
        _timer(),
        _database(db),
        *_folders(),
    ]


def worst(checks: Iterable[Check]) -> State:
    """What the command's exit code follows."""
    states = {check.state for check in checks}
    return next((state for state in (State.FAIL, State.WARN) if state in states), State.OK)


def _version(package: str) -> Check:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Check(package, State.FAIL, f"{package} is not installed; install {package}>={OLDEST[package]}")
    if Version(found) < Version(OLDEST[package]):
        return Check(package, State.FAIL, f"{found} is older than {OLDEST[package]}; upgrade it")
    return Check(package, State.OK, found)


def _gpu() -> Check:
    """A machine without one still searches in the interpreter, hence a warning."""
    try:
        import torch
    except ImportError:
        return Check("gpu", State.FAIL, "torch is not installed")
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        return Check("gpu", State.WARN, f"{build}; only --device interpret works here")
    names = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        names.append(
            f"{p.name} (sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB)"
        )
    oldest = min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    if oldest < (8, 0):
        return Check("gpu", State.FAIL, f"{'; '.join(names)}: compute capability 8.0 or newer is needed")
    return Check("gpu", State.OK, "; ".join(names))


def _nvml() -> list[Check]:
    """Driver, clocks and throttling of the first device, read through NVML."""
    try:
        import pynvml
    except ImportError:
        return [Check("driver", State.WARN, "nvidia-ml-py is not installed: clocks and throttling go unseen")]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [Check("driver", State.WARN, f"no NVIDIA driver answers ({error})")]
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return [
            Check("driver", State.OK, _text(pynvml.nvmlSystemGetDriverVersion())),
            _asked("clocks", lambda: _clocks(pynvml, handle)),
            _asked("throttle", lambda: _throttle(pynvml, handle)),
        ]
    except pynvml.NVMLError as error:
        return [Check("driver", State.WARN, f"NVML answers with an error ({error})")]
    finally:
        pynvml.nvmlShutdown()


def _asked(name: str, question: Callable[[], Check]) -> Check:
    """Virtual and MIG devices answer some NVML questions with `not supported`."""
    import pynvml

    try:
        return question()
    except pynvml.NVMLError as error:
        return Check(name, State.WARN, f"not reported here ({error})")


def _clocks(pynvml: Any, handle: Any) -> Check:
    now = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
    limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    hot = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return Check("clocks", State.OK, f"SM {now} of {most} MHz, power limit {limit_w:.0f} W, {hot} C")


def _throttle(pynvml: Any, handle: Any) -> Check:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    harmless = pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
    names = {
        "power cap": pynvml.nvmlClocksThrottleReasonSwPowerCap,
        "hardware slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
        "heat (software)": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "heat (hardware)": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    found = [name for name, bit in names.items() if reasons & bit]
    if found:
        return Check("throttle", State.WARN, f"{', '.join(found)}: times taken now are marked noisy")
    other = reasons & ~harmless
    return Check("throttle", State.OK, f"other reasons {other:#x}" if other else "none")


def _timer() -> Check:
    """CUDA events where there is a GPU; elsewhere nothing is timed."""
    try:
        import torch
    except ImportError:
        return Check("timer", State.FAIL, "torch is not installed")
    if not torch.cuda.is_available():
        return Check("timer", State.WARN, "no CUDA events here: times of the interpreter are no measurements")
    gap_us = min(_event_gap_us() for _ in range(20))
    detail = f"CUDA events, {gap_us:.2f} us between two empty records"
    if gap_us <= 0:
        return Check("timer", State.FAIL, f"{detail}; no time can be trusted")
    if gap_us > WIDEST_GAP_US:
        return Check("timer", State.WARN, f"{detail}; more than {WIDEST_GAP_US:.0f} us, is the device busy?")
    return Check("timer", State.OK, detail)


def _event_gap_us() -> float:
    import torch

    event: Any = torch.cuda.Event
    first, second = event(enable_timing=True), event(enable_timing=True)
    first.record()
    second.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(second)) * 1000


def _database(db: str | Path | None) -> Check:
    """Opened for reading; whether it may be written is asked of the file system, and nothing is created."""
    target = db if db is not None else os.environ.get("TILEWRIGHT_DB") or None
    try:
        from tilewright.db.paths import locate, network_file_system
        from tilewright.db.reader import Reader
    except ImportError as error:
        return Check("database", State.FAIL, f"{error}; install SQLAlchemy to tune and to query")
    try:
        location = locate(target)
        if location.path is not None and not location.path.exists():
            return _new_database(location.path)
        with Reader.open(target) as reader:
            records = len(reader.active_records())
    except MissingDatabase as error:
        return Check("database", State.OK, str(error))
    except (DatabaseError, UsageError) as error:
        return Check("database", State.FAIL, str(error))
    share = None if location.path is None else network_file_system(location.path)
    writable = location.path is None or (_may_write(location.path) and _may_write(location.path.parent))
    detail = f"{location.shown}: current schema, {records} active records"
    if not writable:
        return Check("database", State.WARN, f"{detail}; read-only here: lookups work, tuning does not")
    if share is not None:
        advice = f"on a network file system ({share}), where SQLite can be damaged"
        return Check("database", State.WARN, f"{detail}; {advice}")
    return Check("database", State.OK, f"{detail}, writable")


def _new_database(path: Path) -> Check:
    folder = next(parent for parent in path.parents if parent.exists())
    if not _may_write(folder):
        return Check("database", State.FAIL, f"{path} does not exist and {folder} is not writable; pass another --db")
    return Check("database", State.OK, f"{path} does not exist yet; the first tune makes it")


def _folders() -> list[Check]:
    """Where compiled kernels are kept: an unwritable one makes every process compile anew, or fail."""
    triton_home = Path(os.environ.get("TRITON_HOME") or Path.home())
    triton_cache = Path(os.environ.get("TRITON_CACHE_DIR") or triton_home / ".triton" / "cache")
    return [_folder("triton cache", triton_cache), _folder("temporary folder", Path(tempfile.gettempdir()))]


def _folder(name: str, path: Path) -> Check:
    existing = path if path.exists() else next(parent for parent in path.parents if parent.exists())
    if not existing.is_dir():
        return Check(name, State.FAIL, f"{path}: {existing} is no folder")
    if not _may_write(existing):
        return Check(name, State.FAIL, f"{path} is not writable; set TRITON_CACHE_DIR or TMPDIR to a folder that is")
    return Check(name, State.OK, str(path))


def _may_write(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK) if path.is_dir() else os.access(path, os.W_OK)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
