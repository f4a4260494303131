"""Where a model's bytes are: in its file, in memory, and in what a pass reads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.core.protocols import KVCache, LanguageModel
from outrider.models.decoder import Decoder
from outrider.models.kv import DecoderCache


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `peak_rss` is the process's, `rss_before_load` what it held before the model; None: the system tells not.

    `weights` is what the weights take as loaded, `pass_weights` what of it a pass reads (layers and head, not the
    embedding, of which a pass reads its rows' alone) and `kv` what it reads of the context; None: not known.
    """

    file: int
    weights: int
    pass_weights: int | None
    kv: int | None
    peak_rss: int | None
    rss_before_load: int | None

    @property
    def model_peak_to_file(self) -> float | None:
        """The peak without what the process held before the model, over the file."""
        if self.peak_rss is None or self.rss_before_load is None:
            return None
        return (self.peak_rss - self.rss_before_load) / self.file

    @property
    def per_pass(self) -> int | None:
        return None if self.pass_weights is None or self.kv is None else self.pass_weights + self.kv


def pass_nbytes(model: LanguageModel) -> int | None:
    """Bytes of the weights that a pass with logits reads: the layers' matrices and the head. None: not known."""
    return model.pass_nbytes if isinstance(model, Decoder) else None


def file_nbytes(path: Path) -> int:
    """Bytes of the weights on disk: the file, or the folder's safetensors files."""
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def kv_nbytes(cache: KVCache, context: int) -> int | None:
    """Bytes of the keys and values of `context` positions."""
    if not isinstance(cache, DecoderCache):
        return None
    return cache.store[:, :, :context].numel() * cache.store.element_size()


def rss() -> int | None:
    """Bytes that the process holds in memory now, mapped files included; None where the system does not tell."""
    return _status_nbytes("VmRSS")


def available() -> int | None:
    """Bytes that this process could take now without anything being swapped out; None where the system does not tell.

    A control group's limit counts; what it can give back (files that were read) is not counted as taken.
    """
    system = _field_nbytes(Path("/proc/meminfo"), "MemAvailable:", 1024)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text("ascii")) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such group, or "max"
        return system
    free = limit - used + (_field_nbytes(group / "memory.stat", "inactive_file", 1) or 0)
    return max(free if system is None else min(system, free), 0)


def peak_rss() -> int | None:
    """The most that the process ever held in memory."""
    known = _status_nbytes("VmHWM")
    if known is not None or sys.platform == "win32":
        return known
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> bool:
    """Makes `peak_rss` count from now on; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    except OSError:
        return False
    return True


def _status_nbytes(field: str) -> int | None:
    return _field_nbytes(Path("/proc/self/status"), f"{field}:", 1024)


def _field_nbytes(path: Path, field: str, unit: int) -> int | None:
    """A number of the file, of lines "field number"; None where there is no such file or field."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.split()[:1] == [field]]
    return unit * int(found[0][1]) if found else None
