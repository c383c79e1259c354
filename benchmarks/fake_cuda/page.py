def page(found): return ""
