"""Which endpoints play, from flags or a YAML file: `--endpoint URL --model NAME`, or `--endpoint models.yaml`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, ValidationError, ValidationInfo, field_validator

from envs.config.settings import Section
from envs.config.text_files import read_text
from envs.config.yaml_loader import load_yaml
from envs.errors import UserError, first_line
from envs.execution.watchdog import bounded

E = TypeVar("E", bound="Endpoint")
#: Holds the key of `--endpoint URL`. It is no setting: a key must stand in no file that a run writes.
KEY_VARIABLE = "ENDPOINT_API_KEY"
#: The longest wait for the file of a key, in seconds.
KEY_S = 5.0


class Endpoint(Section):
    """A model of an OpenAI-compatible server, and how to ask it.

    The key is in the variable `key_env` or in the file `key_file`. `timeout_s` bounds one request. `options` are added
    to the body of every request; null takes a field out: `{"temperature": null, "reasoning_effort": "low"}`. Prices
    are for a million tokens, in any currency.

    Example: `Endpoint(url="https://api.example.com/v1", model="large", key_env="EXAMPLE_KEY", price_in=2, price_out=8)`
    """

    url: str
    model: str = Field(min_length=1)
    key_env: str = ""
    key_file: Path | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    max_concurrent: int = Field(default=16, ge=1)
    timeout_s: float = Field(default=120.0, gt=0)
    max_retries: int = Field(default=5, ge=0, le=100)
    options: dict[str, JsonValue] = Field(default_factory=dict)
    price_in: float | None = Field(default=None, ge=0)
    price_out: float | None = Field(default=None, ge=0)

    @field_validator("url")
    @classmethod
    def _holds_no_secret(cls, url: str) -> str:
        # The URL is recorded and printed; a password or a key in it would be, too.
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise ValueError("must be http://... or https://..., without a password and a query")
        return url.rstrip("/")

    @property
    def title(self) -> str:
        """The name in recordings and errors."""
        return f"{self.model} at {self.url}"

    def read_key(self) -> str:
        """Return the key; empty where none is named. No error shows what was found: it may be most of a key.

        Raises:
            UserError: the variable or the file holds no key.
        """
        if self.key_file is not None:
            try:
                with bounded("reading the key of an endpoint", KEY_S):  # it may be a pipe
                    key = self.key_file.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                fix = f"give a file that holds the key of {self.title}"
                raise UserError("endpoint key", "must be in a readable file", type(error).__name__, fix) from None
        else:
            key = os.environ.get(self.key_env, "").strip()
            if not key and self.key_env in ("", KEY_VARIABLE):
                return ""
        if not key.isascii() or len(key.split()) != 1:
            rule = "must be one word of ASCII characters, in a file or in a variable that is set"
            raise UserError("endpoint key", rule, "something else", f"write the key alone, for {self.title}")
        return key

    def cost(self, usage: Mapping[str, int]) -> float | None:
        """Return what tokens cost; None without prices.

        >>> endpoint = Endpoint(url="http://localhost/v1", model="m", price_in=2, price_out=10)
        >>> endpoint.cost({"prompt_tokens": 500_000, "completion_tokens": 100_000})
        2.0
        """
        if self.price_in is None or self.price_out is None:
            return None
        read = usage.get("prompt_tokens", 0) * self.price_in
        return (read + usage.get("completion_tokens", 0) * self.price_out) / 1e6


class EndpointConfig(Section):
    """Models of OpenAI-compatible servers in place of a local model."""

    endpoint: str = Field(
        default="",
        description="base URL of an OpenAI-compatible server, whose --model plays; or a YAML file that lists several "
        "models; empty: a local model plays",
    )
    endpoint_key_file: Path | None = Field(
        default=None, description=f"file with the key of --endpoint URL; empty: the variable {KEY_VARIABLE}, or no key"
    )
    endpoint_cache: Path | None = Field(
        default=None, description="folder of answers, from which a second run continues; empty: none"
    )
    save_demonstrations: Path | None = Field(
        default=None, description="JSONL file for the successes, as trainer.sft reads them; empty: none"
    )

    @field_validator("endpoint_key_file", "endpoint_cache", "save_demonstrations")
    @classmethod
    def _has_endpoint(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value and not info.data["endpoint"]:
            raise ValueError("needs --endpoint")
        return value

    def endpoints(self, model: str) -> tuple[Endpoint, ...]:
        """Return the endpoints; `model` is that of the command.

        Raises:
            UserError: a setting is wrong.
        """
        if not self.endpoint.startswith(("http://", "https://")):
            if self.endpoint_key_file or model != "starter":
                rule = "must be a URL where --model or --endpoint-key-file is given"
                raise UserError("--endpoint", rule, self.endpoint, "write model and key_file into the file")
            return _read_endpoints(self.endpoint)
        if model == "starter":
            fix = f"give a name from the list that {self.endpoint.rstrip('/')}/models answers with"
            raise UserError("--model", "must name a model of the endpoint", model, fix)
        fields = {"url": self.endpoint, "model": model, "key_env": KEY_VARIABLE, "key_file": self.endpoint_key_file}
        return (checked_endpoint(Endpoint, fields, "--endpoint"),)

    def only(self, model: str) -> Endpoint:
        """Return the endpoint where one must play. Raises `UserError` as `endpoints` does, and if there are several."""
        endpoint, *others = self.endpoints(model)
        if others:
            fix = "give one; python -m trainer.evaluate takes several"
            raise UserError("--endpoint", "must be one model here", f"{1 + len(others)} models", fix)
        return endpoint


def _read_endpoints(name: str) -> tuple[Endpoint, ...]:
    file = Path(name)
    try:
        listed = load_yaml(read_text(file, name), name)
    except (OSError, UnicodeDecodeError) as error:
        fix = f"write http://host:port/v1, or give an existing file ({first_line(error)})"
        raise UserError("--endpoint", "must be a URL or a YAML file", name, fix) from error
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        raise UserError(name, "must be a list of endpoints", type(listed).__name__, "write - url: ... and model: ...")
    return tuple(checked_endpoint(Endpoint, each, f"{name} [{place}]") for place, each in enumerate(listed))


def checked_endpoint(kind: type[E], fields: dict[str, Any], place: str) -> E:
    """Return an endpoint with these settings. Raises `UserError`, which shows no value: it may be a key."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]  # the input may be a key under a mistyped name
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(kind.model_fields)
        raise UserError(f"{place} {name}", first["msg"], "another value", f"known: {known}") from None
