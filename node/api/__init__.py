"""The interface, whichever transport brings a call: the methods, who may call, and what each one does."""
