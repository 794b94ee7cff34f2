"""What processes say to each other: message structs, plans and results, transports.

Imports nothing else of tidemill but `config`; never torch.
"""
