"""Operations: a reference each, and faster backends."""
