"""Problems drawn as in a textbook: true to scale, with letters, marks, expressions and numbers nobody needs."""
