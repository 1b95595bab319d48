"""The interface for both transports: the methods, authentication, and what each method does."""
