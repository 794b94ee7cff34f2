"""Starts the processes, watches them, restarts what died, tells everyone.

May import `wire`, `config`; process entry points are imported by name, in the child only.
"""
