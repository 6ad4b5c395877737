"""An exhaustive model: every state of the protocol that a few messages, workers and faults can bring about.

`programs` cuts the library's own code into steps, `protocol` has the states and what can happen in each, `law` what
must hold, `search` looks at all of it; `breaks` takes lines that protect away. `python -m tests.model` prints figures.

States are looked for breadth first, as TLC does for TLA+ (L. Lamport, "Specifying Systems", 2002), so that what is
broken is told by the shortest story; that the code itself is the model is the idea of VeriSoft (P. Godefroid, "Model
checking for programming languages using VeriSoft", POPL 1997).
"""
