"""The console: a web page at `/` that shows the fleet, its prefixes and its requests, and the data behind it.

Collectors are pure functions of the gateway's state; `app` dispatches paths, `events` streams, `files` has the page.
Nothing in here changes anything.
"""
