"""CPU operators: `native.py` on a small C++ library (csrc/), `torch_backend.py` on torch alone.

`native.py` records the decoder's operators into a program that the library runs, with its own
threads, in one call a step; `library.py` is its interface. Choose with `ops.select`.
"""
