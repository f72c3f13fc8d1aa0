"""Agents that know only an OpenAI or Anthropic URL, as episodes: from their messages to token ids and back.

    request of a client -> openai_requests, anthropic_requests -> Session.answer -> openai_replies, anthropic_replies
                                                                   |  render: messages to ids
                                                                   |  transcript: a tree of turns; ids are kept
                                                                   v
                                                                 engine.agenerate

No web framework here: the routes are the controller's.
"""
