"""Operators: the only place that knows devices.

`Backend` names every operator once. `reference.py` is the plain torch version, right for any
device and dtype and the oracle of all others; `cpu/` and (for GPUs) `triton/` are fast ones.
Operators are cut where fusion pays on both kinds of device: a decoder layer is
`norm_linear` (norm + QKV), `rope_write` (q/k norm + rope + KV write), `attention`,
`linear_residual` (O), `gated_mlp_in` (norm + gate·up + activation), `linear_residual` (down).

May import torch, numpy, triton; nothing else of tidemill but `wire`.
"""
