"""Operations timed on the device at hand, as they will run: compiled regions and their backwards, kept on disk."""
