"""The model folder `best` of a run: the weights with the best held-out accuracy so far, and what they reached.

The folder itself says which step it is of, so a run that was killed and resumed never loses or confuses it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

#: The file of the folder that says so.
RECORD = "best.json"


@dataclass(frozen=True)
class BestModel:
    """The step of the best weights, and their accuracy in the way of playing that is trained.

    Example: `BestModel(step=30, way="with_tool", accuracy=0.61)`.
    """

    step: int
    way: str
    accuracy: float

    @classmethod
    def found(cls, folder: Path) -> BestModel | None:
        """Return what a model folder says; None where there is no such folder."""
        path = folder / RECORD
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None

    def files(self) -> dict[str, str]:
        """Return the file for the model folder, by name."""
        return {RECORD: json.dumps(asdict(self)) + "\n"}
