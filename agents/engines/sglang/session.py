"""The turns of one episode on SGLang servers: each survives pauses for new weights and the loss of servers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agents.engines.pending_turn import PendingTurn
from agents.engines.sglang.payloads import AskedRoutes, GenerateAnswer, generate_body, parse_answer
from agents.engines.sglang.routing import prompt_key
from agents.engines.sglang.servers import Server
from agents.engines.weight_servers import ServerLost, ServerRefused
from agents.types import Completion, GenerateRequest

if TYPE_CHECKING:
    from agents.engines.sglang.engine import SGLangEngine

#: Tries of one turn before it is given up; with the pauses between them over half a minute.
MAX_TRIES = 10
#: Tokens before a turn whose experts are asked for again, so that the agent loop can compare them.
NUM_AGAIN = 4


class SGLangSession:
    """One episode's turns."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine
        self._server: Server | None = None
        self._prompt: int | None = None
        self._salt = ""
        self._num_loaded = 0
        self._origin: object = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Write one turn; it survives pauses for new weights and the loss of servers."""
        engine = self._engine
        turn = PendingTurn(request)
        tries = 0
        while not turn.is_whole:
            server = await self._assigned_server(request)
            # Both are of the weights that write now; others may come before the answer.
            adapter = engine.adapter_name
            salt = self._current_salt()
            asked = self._asked_routes(turn)
            first_route = asked.first if asked else None
            try:
                rid = engine.next_request_id()
                body = generate_body(request, turn.ids, rid, engine.image_token_id, adapter, first_route)
                answer = parse_answer(await engine.send(server, body, request.images, salt), request.sampling, asked)
                if answer.prompt_length is None:
                    engine.adapters.note_unended(server.client, adapter)
                if not engine.is_current(answer.version):
                    raise ServerLost(f"wrote with weights {answer.version}, not {engine.weight_version}")
                # The server counts what was written before a pause as part of the prompt.
                if answer.prompt_length is not None and not turn.num_misread:
                    turn.num_misread = answer.prompt_length - len(request.ids) - len(turn.ids)
                self._take_routes(turn, answer, asked, (server, salt, answer.version))
                turn.note_cached(answer.num_cached)
                turn.append(answer.ids, answer.logprobs, answer.kept_NK)
                turn.stamp(engine.weight_version)
                turn.finish = answer.finish
                # A pause explains an answer without a token; otherwise one that never ends would be asked for again.
                if answer.ids or turn.is_whole or engine.is_paused:
                    engine.count_answer()
                    continue
                fault = f"{server.client.url} ended it before it wrote anything"
            except ServerLost as error:
                engine.servers.report_lost(server, str(error))
                engine.num_retried += 1
                fault = str(error)
            except ServerRefused as error:
                # Another try would be refused too.
                tries = MAX_TRIES - 1
                fault = str(error)
            tries += 1
            if tries == MAX_TRIES:
                engine.count_given_up(fault)
                break
            await asyncio.sleep(pause_s(tries))
        return turn.completion()

    async def _assigned_server(self, request: GenerateRequest) -> Server:
        """Return the session's server, or another one if it is not up. Wait while the engine is paused.

        The session's first request is its prompt, which all samples of a problem share, and all forks of an episode.
        """
        if self._prompt is None:
            self._prompt = prompt_key(request)
        while True:
            await self._engine.may_write.wait()
            if self._server is None or not self._server.is_up:
                self.release_server()
                self._server = await self._engine.servers.pick(self._prompt)
                self._server.num_sessions += 1
            if not self._engine.is_paused:  # `pick` may have waited
                return self._server

    def _asked_routes(self, turn: PendingTurn) -> AskedRoutes | None:
        """Return which experts the next request of a turn asks for, if any."""
        shape = self._engine.settings.routes
        if shape is None or turn.request.num_routed is None:
            return None
        first = turn.num_routed
        if not turn.routes:
            first = max(0, first - NUM_AGAIN)
        return AskedRoutes(first, shape)

    def _take_routes(
        self, turn: PendingTurn, answer: GenerateAnswer, asked: AskedRoutes | None, origin: object
    ) -> None:
        """Append the experts of an answer to its turn. `origin` names the server, its weights and its cache."""
        if asked is None or answer.routes_RLK is None:
            return
        num_known = turn.num_routed - asked.first
        is_cached = origin == self._origin and answer.num_cached >= turn.num_routed
        # What was read anew, elsewhere or by other weights, may have gone to other experts: those that are known stay.
        if is_cached and 0 < num_known <= len(answer.routes_RLK):
            turn.num_again = num_known
            num_known = 0
        turn.routes.append(answer.routes_RLK[num_known:])
        self._origin = origin

    def _current_salt(self) -> str:
        """Return the salt of what the session may go on from: what the current weights have read, or with
        `keeps_kv_cache` any since its first turn. After a load that no training step led to, it begins anew.
        """
        engine = self._engine
        if not (engine.settings.keeps_kv_cache and self._salt and self._num_loaded == engine.num_loaded):
            self._salt = engine.salt
            self._num_loaded = engine.num_loaded
        return self._salt

    def release_server(self) -> None:
        """Stop counting as a session of the server."""
        if self._server is not None:
            self._server.num_sessions -= 1
            self._server = None


def pause_s(tries: int) -> float:
    """Return the seconds to wait before another try: 0.1, then twice as long each time, at most 10."""
    return min(0.05 * 2**tries, 10.0)
