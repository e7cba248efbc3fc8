"""Check that an installed wheel has a working native library; cibuildwheel runs this on every platform."""

import torch

from paceline.model.native import library as native_lib
from paceline.model.native.library import Matrix

library = native_lib.require()
weight = torch.randn(32, 64)
matrix = Matrix([(32, "float32")], 64)
matrix.fill(0, weight)
x_TD = torch.randn(3, 64)
for isa in library.pn_available().decode().split(","):
    native_lib.use(isa)
    torch.testing.assert_close(matrix.multiply(x_TD, torch.float32), x_TD @ weight.T, rtol=1e-4, atol=1e-4)
    print(f"{native_lib.library_path()}: {isa} multiplies")
