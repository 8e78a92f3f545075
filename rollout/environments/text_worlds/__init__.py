"""Text worlds of other people, behind one environment; their libraries are imported when a world is opened.

world      what a world promises, and `WorldEnv`, which plays any of them
gymnasium  any Gymnasium environment whose actions can be written
alfworld   household tasks in TextWorld
webshop    a shop to find a product in
"""
