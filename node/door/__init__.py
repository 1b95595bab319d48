"""Where connections come in, whichever protocol they speak: TLS, places, deadlines, HTTP/2's frames, what arrived."""
