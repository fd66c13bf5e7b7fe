"""Operations of a program replaced by faster ones."""
