"""What the library costs on this machine: `python -m benchmarks` prints every figure beside the one to reach.

Nothing here is a test, and no test asserts a speed. A figure is a ratio of two arms that ran in the same minutes, in
small alternating blocks, so that what else the machine does meets both.
"""
