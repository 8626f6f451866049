"""Problems drawn like those of a textbook: true to scale, with lettered points, marks, expressions and spare numbers."""
