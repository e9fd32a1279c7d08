"""
The bus: publish/subscribe through a broker, and a bus with the same contract within one process.
"""
