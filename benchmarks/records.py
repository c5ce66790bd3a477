"""GPU records: JSON lines that say what was measured, on what, for which `csrc/`.

Every line carries the fields of `Environment`; `run` names one process run, and only figures of
one run are ever compared. Lines are appended to `benchmarks/results/<gpu>-<date>.jsonl`.
"""

import dataclasses
import datetime
import json
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "benchmarks" / "results"
SANITIZER_TOOLS = ("memcheck", "racecheck")  # what a tree must pass under

# What each kind of line holds beside the environment's fields.
REQUIRED_FIELDS = {
    "tests": {"passed", "failed", "skipped", "seconds"},
    "sanitizer": {"tool", "cases", "errors"},
    "bench": {
        *("op", "impl", "family", "case", "dtype", "head_dim", "head_dim_v", "causal"),
        *("seqlen_q", "seqlen_k", "batch", "heads_q", "heads_k", "deterministic", "page_size"),
        *("ms", "tflops", "gbps", "rel_error", "plan"),
    },
    "claim": {"claim", "source", "value", "unit", "verdict"},
    "overhead": {"impl", "mode", "us"},
}


@dataclasses.dataclass(frozen=True)
class Environment:
    run: str
    gpu: str
    driver: str
    cuda: str
    torch: str
    date: str
    commit: str
    csrc_sha256: str

    @classmethod
    def of_this_run(cls, commit: str | None = None) -> "Environment":
        """Read from the GPU, torch and the tree; `commit` where there is no git to ask."""
        import torch

        from flashattn_ext import _source_hash

        now = datetime.datetime.now(datetime.timezone.utc)
        return cls(
            run=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}",
            gpu=torch.cuda.get_device_name(),
            driver=driver_version(),
            cuda=torch.version.cuda or "",
            torch=str(torch.__version__),
            date=f"{now:%Y-%m-%d}",
            commit=commit or git_commit(),
            csrc_sha256=_source_hash.csrc_sha256(REPOSITORY) or "",
        )

    @property
    def results_path(self) -> Path:
        name = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return RESULTS / f"{name}-{self.date}.jsonl"


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "unknown"
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.split("\n")[0].strip() or "unknown"


def git_commit() -> str:
    """The commit of the tree, with `+` when tracked files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            "cannot read the commit from git here; name it: --commit <hash of the tested tree>"
        ) from error


def complete(environment: Environment, line: dict[str, Any]) -> dict[str, Any]:
    """`line` with the environment's fields, checked against the fields of its kind."""
    kind = line.get("kind")
    if kind not in REQUIRED_FIELDS:
        raise ValueError(f"record kind {kind!r}: wanted one of {sorted(REQUIRED_FIELDS)}")
    missing = REQUIRED_FIELDS[kind] - line.keys()
    if kind == "bench" and line.get("op") == "decode":
        missing.discard("causal")
    if missing:
        raise ValueError(f"record of kind {kind!r} lacks {sorted(missing)}")
    return {"kind": kind, **dataclasses.asdict(environment), **line}


def claim(
    name: str, value: float, unit: str, *, holds: bool, source: str, **fields: Any
) -> dict[str, Any]:
    """A line that says whether a measured value is what it should be; `source` measures it."""
    return {
        "kind": "claim",
        "claim": name,
        "source": source,
        "value": value,
        "unit": unit,
        "verdict": "yes" if holds else "no",
        **fields,
    }


def append(
    environment: Environment, lines: Iterable[dict[str, Any]], path: Path | None = None
) -> Path:
    """Append `lines` to `path`, by default the results file of this GPU and day."""
    path = environment.results_path if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for line in lines:
            file.write(json.dumps(complete(environment, line)) + "\n")
    return path


def read(results: Path = RESULTS) -> list[dict]:
    """Every record under `results`, oldest run first."""
    lines = []
    for path in sorted(results.glob("*.jsonl")):
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                lines.append(json.loads(text))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path.name}, line {number} is not JSON: {error}") from error
    return sorted(lines, key=lambda line: line["run"])


def latest_run(lines: Iterable[dict], kind: str, **wanted: object) -> list[dict]:
    """The lines of the newest run that has any of this kind with the wanted field values."""
    fitting = [
        line
        for line in lines
        if line["kind"] == kind and all(line.get(key) == value for key, value in wanted.items())
    ]
    return [line for line in fitting if line["run"] == fitting[-1]["run"]]
