"""Queue and policy, KV pages and prefix tree, step planning, simulated runner.

Plain Python and NumPy. May import `wire`, `config`. Never imports torch.

Read `scheduler.py` first (the loop), then `planner.py` (one step), `kv_cache.py` with `pages.py`
and `prefix_tree.py` (who owns which page).
"""
