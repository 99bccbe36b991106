"""Train, align, improve, serve and run vision-language-action policies."""

__version__ = "0.1.0"
