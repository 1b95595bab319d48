// Search in pages that are read from a disk: a browser starts no worker there, so a frame of the page stands in for one.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.ready = new Promise((resolve) => {
        this.inside.postMessage = (data) => this.give(data)
        this.inside.importScripts = (...urls) => urls.reduce((done, each) => done.then(() => this.load(each)), this.ready)
        this.load(url).then(resolve)
      })
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        script.src = new URL(url, location)
        script.onload = resolve
        script.onerror = reject
        this.inside.document.body.append(script)
      })
    }

    give(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
