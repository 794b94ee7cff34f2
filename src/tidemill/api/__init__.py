"""Server I/O: HTTP routes by protocol, streaming, auth, admission. May import `wire`, `config`.

Nothing imports `api` but the supervisor's process table.
"""
