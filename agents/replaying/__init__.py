"""Replays recorded episodes through an environment and reports what differs.

`replayer` replays with the environment alone, `stream_replayer` with the whole agent loop. Both give an
`episode_result`, which `difference` compares with the recorded one. `runner` replays many episodes concurrently, and
`report` prints the results. `compatibility` compares the recorded environment and model with today's.

`fork` continues one episode from a turn, after a replay of the turns before it; `continuation` lets a person or a model
write the next turns.
"""
