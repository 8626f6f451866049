"""What a machine does in a second: constants with their source, read from a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from envs.errors import UserError, did_you_mean, first_line

BUNDLED = Path(__file__).parent / "hardware"
#: How the source of a constant begins that nobody has measured, and that of a vendor's figure.
NOT_MEASURED = "not measured"
DATASHEET = "datasheet"


@dataclass(frozen=True)
class Hardware:
    """A machine. Rates are 1e9 bytes or 1e12 operations a second of one GPU, times are seconds; where a cost is 0 it
    is not counted. `sources` says of each constant where it is from.

    - `memory_gib`, `gpus_per_host`: memory of a GPU, GPUs of a host.
    - `memory_gb_s`: memory bandwidth of a decode step. `decode_step_s`, `decode_row_s`: what it takes besides, in all
      and for each row. `collective_s`: a small sum over the GPUs of a tensor-parallel server.
    - `prefill_tflops`, `train_tflops`: operations that reading and training need, a second. `read_s`: what it takes
      besides whenever a server begins to read, and writes nothing; `image_s`: and for each image that is new to it.
    - `request_s`, `image_token_s`: what a server's tokenizer process takes for a turn, and for each image token.
    - `update_s`, `ranks_s`: a step of the learner without its operations, and what several ranks add.
    - `link_gb_s`, `network_gb_s`: collectives of the learner between GPUs of a host, and between hosts.
    - `offload_gb_s`: the optimizer's state from and to the CPU.
    - `push_s`, and `ipc_gb_s`, `nccl_gb_s`, `disk_gb_s`: a weight push without its bytes, and the bytes by transport.
    - `release_s`: servers give their memory to the learner and take it back, once a step with `colocate`.
    - `turn_s`: the agent loop's event loop, for a turn.

    Example: `Hardware.read("h100").memory_gb_s` is 3350.0, and `.sources["memory_gb_s"]` begins with "datasheet".
    """

    name: str
    sources: Mapping[str, str]
    memory_gib: float
    gpus_per_host: float
    memory_gb_s: float
    decode_step_s: float
    decode_row_s: float
    collective_s: float
    prefill_tflops: float
    read_s: float
    image_s: float
    train_tflops: float
    request_s: float
    image_token_s: float
    update_s: float
    ranks_s: float
    link_gb_s: float
    network_gb_s: float
    offload_gb_s: float
    push_s: float
    ipc_gb_s: float
    nccl_gb_s: float
    disk_gb_s: float
    release_s: float
    turn_s: float

    @classmethod
    def read(cls, name: str | Path) -> Hardware:
        """Read a bundled machine by name, or a file.

        Raises:
            UserError: there is none, or a constant is missing, unknown or no number.
        """
        bundled = sorted(path.stem for path in BUNDLED.glob("*.json"))
        if str(name) in bundled:
            path = BUNDLED / f"{name}.json"
        else:
            path = Path(name)
        try:
            return cls.of(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            known = f"give one of {', '.join(bundled)}, or a file like trainer/planning/hardware/h100.json"
            fix = did_you_mean(str(name), bundled) or known
            raise UserError("--hardware", "must be a bundled machine or a file", str(name), fix) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            fix = "take trainer/planning/hardware/h100.json as an example"
            raise UserError(
                f"--hardware {name}", f"must hold {len(CONSTANTS)} constants", first_line(error), fix
            ) from error

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Hardware:
        """Return the machine of a file: `{"name": ..., "constants": {NAME: {"value": ..., "source": ...}}}`."""
        given = data["constants"]
        if wrong := set(given) ^ set(CONSTANTS):
            raise ValueError(f"unknown or missing: {', '.join(sorted(wrong))}")
        values = {name: float(given[name]["value"]) for name in CONSTANTS}
        if wrong := [name for name in (*RATES, "memory_gib", "gpus_per_host") if values[name] <= 0]:
            raise ValueError(f"must be above 0: {', '.join(wrong)}")
        if wrong := [name for name, value in values.items() if not 0 <= value < float("inf")]:
            raise ValueError(f"must be finite and not below 0: {', '.join(wrong)}")
        return cls(str(data["name"]), {name: str(given[name]["source"]) for name in CONSTANTS}, **values)

    def notes(self) -> list[str]:
        """Return a line for what was not measured, and one for what is a vendor's figure."""
        lines = []
        for kind, text in ((NOT_MEASURED, "not measured"), (DATASHEET, "from the datasheet")):
            names = [name for name in CONSTANTS if self.sources[name].startswith(kind)]
            if names:
                lines.append(f"{text}: {', '.join(names)}")
        return lines


CONSTANTS = tuple(field.name for field in fields(Hardware) if field.name not in ("name", "sources"))
RATES = tuple(name for name in CONSTANTS if name.endswith(("_tflops", "gb_s")))
