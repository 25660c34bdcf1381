"""Parts that other engines load: they run where those engines run."""
