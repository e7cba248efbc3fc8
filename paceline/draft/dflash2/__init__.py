"""DFlash 2: DFlash with convolutions and a selector."""
