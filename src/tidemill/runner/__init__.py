"""The model runner: its loop, slots, sampler, memory fit. May import `models`, `ops`, `wire`,
`config`. With `models` and `ops`, the only place that imports torch."""
