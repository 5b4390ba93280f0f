"""The device floor: Triton kernels, rows and copies on the device of a model.

It needs torch, triton and numpy alone and nothing of the rest of the package, so that its tests run where
nothing is built. Nothing is imported here.
"""
