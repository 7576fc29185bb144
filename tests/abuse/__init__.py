"""Requests that are huge, deep, many or odd, beside one running stream: nobody else is to notice
them."""
