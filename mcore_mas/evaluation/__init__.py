"""Evaluation of trained teams: scores on held-out tasks, chats, servers, and export of models."""
