"""DFlash 2: a DFlash drafter with convolutions and a candidate selector."""
