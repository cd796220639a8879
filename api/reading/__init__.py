"""What a sampled text says: reasoning, calls of tools, and content, piece by piece as its tokens come.

parts.py     what readers give
json_call.py one call written as a JSON object
calls.py     the formats in which models write calls, and which one a checkpoint's template asks for
thinking.py  reasoning between marks
message.py   all of it over one sequence: the deltas of a stream, and the message that they add up to

A whole message is what its stream adds up to: both come from the same reader. Token ids and logprobs are never touched.
"""
