"""Audio: files as waveforms (`files`), and checks of waveforms (`waveforms`)."""
