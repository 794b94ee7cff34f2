"""Queue and policy, KV pages and prefix tree, step planning, simulated runner.

Plain Python and NumPy. May import `wire`, `config`. Never imports torch.
"""
