"""Evaluates models of OpenAI-compatible servers: the context of each, and the successes as demonstrations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from agents.endpoints.client import EndpointClient
from agents.endpoints.episode import EndpointEpisode
from agents.endpoints.judge import load_rewards
from agents.recording import Recorder
from agents.recording.manifest import text_manifest
from agents.rollout.episode import Episode
from agents.rollout.mixed_episode import by_entry
from envs.execution.load import load_env
from envs.spec import EnvSpec
from trainer.checkpoint.run_dir import EPISODES, make_folder
from trainer.config.evaluation import EvaluateConfig
from trainer.evaluation.episodes import Way
from trainer.evaluation.evaluator import EvaluationContext, read_problems


@dataclass(frozen=True, eq=False)
class EndpointContext(EvaluationContext):
    """The context of a model of an endpoint."""

    client: EndpointClient

    def episode(self, way: Way) -> Episode:
        """Return the agent loop of a way."""
        max_new_tokens = self.config.env.max_new_tokens
        temperature = self.config.measurement.eval_temperature

        def of_entry(spec: EnvSpec, max_turns: int) -> Episode:
            return EndpointEpisode(self.client, spec, max_turns, max_new_tokens, temperature, way.use_tools)

        return by_entry(self.spec, way.max_turns, of_entry)

    def recorder(self, ways: Mapping[str, Episode]) -> Recorder:
        """Open the recording of these agent loops."""
        manifest = text_manifest(self.spec, str(self.model_path), ways, self.tool_format)
        return Recorder(self.folder / EPISODES, manifest, share=self.config.measurement.record)

    @property
    def note(self) -> str:
        """Where the answers came from."""
        sources = self.client.sources
        return f"; {sources['server']} answers of the server, {sources['cache']} of the cache"

    def cost(self, usage: Mapping[str, int]) -> float | None:
        """Return what tokens cost at the prices of the endpoint."""
        return self.client.endpoint.cost(usage)


def prepare_endpoints(config: EvaluateConfig) -> list[EndpointContext]:
    """Check everything, and build a context for each endpoint; several have a folder each in that of the evaluation.

    Raises:
        UserError: environment, data, endpoint, key or output folder cannot be used.
    """
    spec = config.env.resolve()
    build_env = load_env(spec)
    for entry in spec.entries:
        # Loaded again for each way; here only to fail before a server is asked.
        load_rewards(entry.reward)
    tool_format = spec.args().tool_format
    cache = config.endpoints.endpoint_cache
    endpoints = config.endpoints.endpoints(config.model.model)
    clients = [EndpointClient(endpoint, tool_format, cache) for endpoint in endpoints]
    # The server's tokenizer is not here: a prompt that is too long for it is an episode that it refuses.
    # Before the folder is made: a wrong flag leaves nothing behind.
    problems = read_problems(config, spec, build_env, tool_format, None)
    own = config.measurement
    folder = make_folder(own.out, own.name, f"{spec.id}-evaluation", can_resume=False)
    contexts = []
    for number, client in enumerate(clients):
        place = folder
        if len(clients) > 1:
            # Names of models have slashes, and two endpoints may serve one model.
            place = folder / f"{number}-{re.sub(r'[^A-Za-z0-9.-]', '_', client.endpoint.model)[:80]}"
            place.mkdir()
        name = client.endpoint.model
        title = client.endpoint.title
        contexts.append(
            EndpointContext(config, place, spec, build_env, *problems, name, title, tool_format, client, client)
        )
    return contexts
