"""Recorded episodes, played through an environment once more: records come in, what differs goes out.

`played` says what is compared, `player` asks an environment alone, `stream` drives the whole agent loop, `difference`
compares, `rounds` plays many at once and some of them again, `rescore` counts rewards, `report` prints.

`fork` plays one episode on from a turn, `prefix` says what is not as recorded up to there, `continuation` lets a
person, a script or a model go on. `slime_dump` reads what slime saves, `slime_samples` makes trajectories of that, and
`slime` a recording.
"""
