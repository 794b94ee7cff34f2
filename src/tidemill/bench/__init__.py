"""Load generation, measurements, reports. May import `llm`, `config`; talks HTTP otherwise."""
