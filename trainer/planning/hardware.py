"""What a machine does in a second: constants, read from a YAML file that names the source of each in a comment."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from envs.config.files import read_file
from envs.config.settings import Section, validate
from envs.errors import UserError

BUNDLED = Path(__file__).parent / "hardware"


class Hardware(Section):
    """A machine. Rates are 1e9 bytes or 1e12 operations a second of one GPU.

    Example: `Hardware.read("h100").memory_gb_s` is 3350.0.
    """

    name: str = Field(description="what the plan calls it")
    memory_gib: float = Field(gt=0, description="memory of a GPU")
    gpus_per_host: int = Field(gt=0, description="GPUs of a host")
    memory_gb_s: float = Field(gt=0, description="memory bandwidth of a decode step")
    tflops: float = Field(gt=0, description="operations that reading and training need, a second")
    decode_step_s: float = Field(ge=0, description="what a decode step takes besides its bytes")
    read_s: float = Field(ge=0, description="what it takes a server to begin to read, while it writes nothing")
    image_s: float = Field(ge=0, description="what a server takes for an image that is new to it")
    update_s: float = Field(ge=0, description="a step of the learner without its operations")
    link_gb_s: float = Field(gt=0, description="collectives of the learner between GPUs of a host")
    network_gb_s: float = Field(gt=0, description="and between hosts")
    push_s: float = Field(ge=0, description="a weight push without its bytes")
    push_gb_s: float = Field(gt=0, description="the bytes of a weight push")
    release_s: float = Field(ge=0, description="servers free their memory and take it back, once a step with colocate")

    @classmethod
    def read(cls, name: str) -> Hardware:
        """Read a bundled machine by name, or a file.

        Raises:
            UserError: there is no such file, or a constant is missing, unknown or no number.
        """
        bundled = BUNDLED / f"{name}.yaml"
        # A bundled name wins over a file of the same name.
        if bundled.is_file():
            file = bundled
        else:
            file = Path(name)
        constants = read_file(cls, file, f"--hardware {name}")
        # Asked here: the error of a missing field would name a flag that there is not.
        if missing := cls.model_fields.keys() - {path[-1] for path in constants}:
            fix = "take trainer/planning/hardware/h100.yaml as an example"
            raise UserError(f"--hardware {name}", "must hold every constant", f"no {', '.join(sorted(missing))}", fix)
        return validate(cls, constants)
