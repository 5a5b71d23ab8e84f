"""The exceptions that tilewright raises on purpose; the command line maps each to an exit code."""


class TilewrightError(Exception):
    """Base of all of them; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(TilewrightError, ValueError):
    """An argument is wrong: the message names it, its value and what is accepted."""

    exit_code = 2


class ProblemError(UsageError):
    """A problem file, an axis or a workload case is malformed or contradictory."""


class NothingFound(TilewrightError):
    """The question was well formed and nothing answers it."""

    exit_code = 3


class MachineUnfit(TilewrightError):
    """The machine lacks what was asked for: a GPU, Triton, a driver."""

    exit_code = 4


class GradientNeeded(TilewrightError, RuntimeError):
    """Autograd would have to record what has no gradient: a given output, keys and values for a cache, a gradient."""


class NotWarmedUp(TilewrightError, RuntimeError):
    """A CUDA graph is being captured and the call would compile: call `tilewright.runtime.warmup` first."""


class DatabaseError(TilewrightError):
    """The database is locked, damaged, foreign, of a newer schema, or not writable."""

    exit_code = 5


class MissingDatabase(DatabaseError):
    """There is no database where a reader looked; readers create none."""


class StoreLocked(DatabaseError):
    """Another process held the write lock for longer than the busy timeout."""


class SchemaTooNew(DatabaseError):
    """A later version of tilewright wrote the file; it is left untouched."""


class NotADatabase(DatabaseError):
    """The file is no tilewright database: garbage, or another program's; it is left untouched."""


class DamagedDatabase(DatabaseError):
    """The file was a tilewright database and is cut off or malformed; it is left untouched."""


class NotWritable(DatabaseError):
    """The file or its folder may not be written."""


class Unreachable(DatabaseError):
    """The database server does not answer or went away; what it acknowledged is kept."""


class LeaseLost(DatabaseError):
    """The job was given to another worker, because this one was not heard of for too long; nothing was written."""


class DiskFull(DatabaseError):
    """No room for one more row; what was stored before is kept."""
