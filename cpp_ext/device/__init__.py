"""The device floor: Triton kernels, rows and copies on the device of a model.

It needs torch and triton alone and nothing of the rest of the package, so that its tests run where nothing is built.
Nothing is imported here.
"""
