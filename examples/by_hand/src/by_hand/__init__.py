"""
A job whose parts are started by hand. Its ranks run `by_hand.train`.
"""
